"""`samestep report`: a run folder as one HTML page."""
