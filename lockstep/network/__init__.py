"""The network of one trainer, from its construction to one step of its optimizer.

- `build.py` constructs the network that `model` names.
- `arena.py` places weights, optimizer state and float buffers in one shared block.
- `replica.py` trains on a batch; `program.py` is the interface that it implements.
- `optimizer.py` steps on all weights, or on one rank's shard with gradients from `gradients.py`.
- `low_precision.py` sets the precision and keeps bfloat16 copies of weights.
- `layers.py`, `dropout.py`, `convolution.py` and `batch_norm.py` are layers. `layers.py` also has a
  GPU compute some of them in CUDA kernels of Lockstep's own; `lrn.py` and `pool.py` are former names.
- `stages.py` freezes parts of a network and gives them learning rates.
- `step_graph.py` compiles a step or captures it as a CUDA graph.
- `recorder.py` measures time by phase and sums losses.
"""
