"""ZeroMQ on AnyIO: sockets with one owner task each, and the endpoints that they are bound to."""
