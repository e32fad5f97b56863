"""Other packages' training loops, with towers in them."""
