"""Does a model keep the promise? `samestep.check`."""
