"""Where blocks live: chain hashes, layouts, the shared arena, the two tiers and the store over them. Knows no
socket.
"""
