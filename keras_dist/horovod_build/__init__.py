"""Builds a Horovod wheel for the installed TensorFlow, caches it, installs it and tests it.

Horovod's last release, 0.28.1, is a source distribution that neither compiles with current versions of TensorFlow nor
reports stalled ranks over Gloo. Small patches fix both. The modules import no TensorFlow.
"""
