"""`fastattention plan`: predicts what a device would do, without the device. One module per subcommand.

ascend.py, offload.py, allreduce.py and traffic.py are the subcommands; timeline.py, lengths.py and overlap.py draw
pictures.
"""
