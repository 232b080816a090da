"""The two errors of this package that Python has no name for."""


class UnsupportedError(NotImplementedError):
    """A valid request that is not offered on this device; the message says what is."""


class CompileError(RuntimeError):
    """NVRTC refused a kernel; the message holds its log, the options, the file and the line."""
