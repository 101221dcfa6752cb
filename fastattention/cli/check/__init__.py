"""`fastattention check`: the first command to run on hardware on which the package has not been tested.

cases.py lists calls, calls.py makes their tensors, judge.py has the allowed errors, run.py runs each call by every
implementation of the device. speeds.py and model.py add a few times and a tiny model. report.py writes the file that is
sent back, facts.py describes the machine in it, and privacy.py removes names and paths of its owner.
"""
