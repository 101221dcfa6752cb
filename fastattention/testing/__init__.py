"""What a call must return: used by the tests of every backend and by `fastattention check`.

case.py       the fields of a case: one call, described without its tensors
memory.py     how tensors lie in memory, with NaN everywhere else
caches.py     where the tokens of a cache lie in it, with and without pages
calls.py      a case and a dtype -> the call of a public function that it stands for
oracle.py     what that call must return, and how far from it a result may be
written.py    which memory it may write
devices.py    the same call on another device
linear.py     the cases of linear attention, and what they must return
"""
