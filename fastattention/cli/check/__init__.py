"""`fastattention check`: the first command to run on hardware on which the package has not been tested.

cases.py lists calls, `fastattention.testing` says what each must return, and run.py runs each by every implementation
of the device. speeds.py and model.py add a few times and a tiny model. report.py keeps the file that is sent back,
facts.py describes the machine in it, and privacy.py takes out whose it is.
"""
