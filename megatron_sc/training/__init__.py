"""The Megatron glue: flags, batch, output processor, loss function, forward step, launcher, CPU backend.

Import what you need from its module: those that import Megatron must be imported after ``cpu.install()``.
"""
