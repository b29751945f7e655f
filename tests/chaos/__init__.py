"""The nemesis: real processes under load, faults of every kind, and a history that named checkers judge.

`python -m tests.chaos` plays it (`make chaos`), and `test_chaos.py` plays a short form.

* `world`: the suite, two replicas of each service, and what people and nemesis share.
* `people`, `front_ends`, `watchers`: the load. `caller` sends each request again until it is answered.
* `tools`, `effects`: tools whose every effect is a line in a file that no crash can take back.
* `faults`, `model_faults`, `clocks`: what is done to the suite, in phases.
* `history`: what clients did and saw. `record`: that, the ledger as the public API shows it, and the effects.
* `logs`: what the logs of all processes must not hold. The model is strict, and says there what it refused.
* `checkers`: what must hold of a record; `mutants` shows with a `story` that each of them bites.
* `play`, `report`: a whole game, and what it came to.
"""
