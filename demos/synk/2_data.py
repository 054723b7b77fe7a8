"""Data: arrays in memory that all ranks map, so that a call need not copy them."""

import numpy as np

import lockstep.synk as synk

synk.fork()
random = np.random.default_rng(0)

x = synk.data(random.normal(size=(5, 4)), name="x")
print(x, "items:", x.size, "room for:", x.alloc_size)

x[3] = 0  # read and written like an array
x[:, 0] += 1
print(np.asarray(x))

x.set_value(random.normal(size=(2000, 10)), oversize=1.1)  # another shape; new memory, with room to grow
room = x.alloc_size
x.set_value(random.normal(size=(2100, 10)))  # fits: no new memory
assert x.alloc_size == room
x.set_length(2150)  # existing rows are kept
x.set_value(random.normal(size=(100, 8)))
assert x.alloc_size == room
x.free_memory()  # the only way to make alloc_size smaller
print("after free_memory:", x, "room for:", x.alloc_size)

single = synk.data(dtype="float32", ndim=2)
single.set_value(random.normal(size=(3, 3)), force_cast=True)  # float64 to float32 loses information
assert single.dtype == np.float32
