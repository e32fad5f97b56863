"""What the program that trains consists of: the objects in its reach, the lines that run, its source code."""
