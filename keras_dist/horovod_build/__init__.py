"""Builds a Horovod wheel for the installed TensorFlow, caches it, installs it and proves it.

Horovod's last release, 0.28.1, is a source distribution that neither compiles against today's TensorFlow nor
warns of stalled ranks over Gloo. Two small corrections repair both. The modules, in the order of the work:
`requirements` (what the machine lacks), `cache` (is there such a wheel already?), `source` and `corrections`
(fetch and repair), `build` (compile, with progress), `install` (pip), `proof` (two processes all-reduce).
Nothing here imports TensorFlow into the calling process.
"""
