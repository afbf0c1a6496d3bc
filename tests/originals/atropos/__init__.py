"""Atropos' own environments, from the source distribution of atroposlib, run by `python -m stepwell.envs`.

The files, and every module beside them, are the published ones. What they fetch from elsewhere is stood in for: data
sets, tokenizers and packages, one by one and by name (`table/`), and a model by a scripted engine.
"""
