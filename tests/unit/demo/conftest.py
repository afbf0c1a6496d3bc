import torch

torch.set_num_threads(1)  # models this small only wait for the others
