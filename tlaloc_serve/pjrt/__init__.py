"""The PJRT C ABI by ctypes: find a plugin, open it, hold its handles. Knows nothing about models."""
