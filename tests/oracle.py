"""The sum along the canonical tree in a few lines, for tests to compare with."""


def tree(leaves, add):
    """The canonical tree as RFC 6962 defines it: split at the largest power of two below n."""
    if len(leaves) == 1:
        return leaves[0]
    middle = 1 << (len(leaves) - 1).bit_length() - 1
    return add(tree(leaves[:middle], add), tree(leaves[middle:], add))


def add(left, right):
    """The sum of two towers' gradients; an absent one adds nothing."""
    if left is None or right is None:
        return right if left is None else left
    return left + right
