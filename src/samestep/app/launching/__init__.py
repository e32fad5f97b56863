"""Starting a job's workers on one or several hosts, watching them and replacing lost ones."""
