"""Where DeepSpeed's internals are touched, and nowhere else."""
