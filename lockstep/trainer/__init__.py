"""The duties of a trainer besides computing with its network (train_funcs.py).

setup.py sets cores and exchange, coordinator.py agrees with all trainers on stopping and saving,
counts.py keeps integer buffers equal, and recheck.py computes other trainers' gradients again.
progress.py sends messages to the launcher, straggler_watch.py finds the trainer that the others wait
for, and balancing.py follows its measurements. validation.py validates, saving.py writes checkpoints in
the background, receipts.py writes the receipts by which a run can be verified, and postmortem.py
examines losses that are not finite.
"""
