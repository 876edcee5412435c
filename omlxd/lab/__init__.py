"""The lab: replays recorded workloads against policies and sizes, with the daemon's own policy code."""
