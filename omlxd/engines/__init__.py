"""Adapters between omlxd and the engines that compute KV caches."""
