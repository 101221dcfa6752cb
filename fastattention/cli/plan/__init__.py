"""`fastattention plan`: predicts what a device would do, without the device. One module per subcommand.

ascend.py, offload.py, allreduce.py and traffic.py are the subcommands; NAME_picture.py draws the picture of one.
models.py and machines.py have what they are predicted for.
"""
