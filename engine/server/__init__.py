"""The replica server: an `EngineCore` behind the worker protocol, over HTTP on a TCP port or a unix socket."""
