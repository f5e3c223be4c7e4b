"""Timings, as ratios against a peer in the same run. Not tests: nothing here passes or fails."""
