"""Campaigns that attack Lockstep hundreds of times, to test its promises (docs/reliability.md)."""
