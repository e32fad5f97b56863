"""`samestep.check`: does a model take the same steps on any number of workers?"""
