"""A check of the machine before training: python -m lockstep.doctor"""
