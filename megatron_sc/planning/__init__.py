"""What a job needs, on paper: parameters, memory and traffic of each rank, before a node is allocated."""

from .plan import Plan, make_plan

__all__ = ["Plan", "make_plan"]
