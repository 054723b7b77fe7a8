"""A trained network for other programs: python -m lockstep.export RUN --to FORM."""
