"""verl: batches as a DataProto (data_proto.py), and a mode of its V1 trainer that trains from a pool (trainer_mode.py).

    python -m verl.trainer.main_ppo 'hydra.searchpath=[pkg://stepwell.trainers.verl]' +config=stepwell …

Importing this does not import verl.
"""

from stepwell.trainers.verl.data_proto import VerlRows, to_data_proto, verl_rows

__all__ = ["VerlRows", "to_data_proto", "verl_rows"]
