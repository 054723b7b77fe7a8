"""What is done to Lockstep by the hundred, to see that it keeps its promises (docs/reliability.md)."""
