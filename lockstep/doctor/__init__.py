"""What a user needs to know before training, and what is wrong: python -m lockstep.doctor"""
