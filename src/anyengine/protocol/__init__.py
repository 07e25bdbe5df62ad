"""The wire protocol, sans-IO: no sockets, no tasks, no clocks. Both processes import it."""
