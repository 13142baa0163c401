"""Several settings of one job, each with several seeds: which runs a sweep file means, and what they say.

spec         What does a sweep file mean?     Its runs, each with a checked job and a name that follows from it.
plan         What is left to do?              Compares the file with the runs that exist.
conduct      How are the runs made?           A few at a time; one that fails does not end the others.
local        Where do they run?               On a stack of this machine, each in its own run folder,
service      Where else?                      or through the service.
statistics   How sure is a mean over seeds?   Student's t, and curves against steps, samples or divergence.
results      What did each setting give?      Figures by setting, from the runs that are done.
report       What does it leave?              A table, JSON, and a figure with bands.
"""
