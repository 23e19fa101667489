"""Scheduling: what a step runs, and what is given up for it."""
