"""Export of a trained network to other programs: python -m lockstep.export RUN --to FORMAT."""
