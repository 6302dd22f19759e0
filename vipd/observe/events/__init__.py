"""Events with reason and cause: made from log records, kept on disk, sent as a stream.

The API, the status page and the metrics may import it.
"""
