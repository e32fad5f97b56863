"""Starting a job's workers on one host or several, watching and replacing them."""
