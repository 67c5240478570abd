"""The centered loss for training frameworks that bring their own loop: one module each, loaded by its path.

See docs/integrations.md for what each framework must record and pass on.
"""
