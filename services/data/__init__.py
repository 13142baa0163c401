"""Data: files and data sets to prompts, and the order in which a run meets them.

readers       rows of a file or folder            hub           rows of a Hugging Face data set
mapping       fields, filters, tags               render        templates and chat templates
prompts       a DataSpec to prompts               mixture       the order of prompts: shuffles, mixtures, curricula
recipes       published layouts                   decontaminate overlap of a training set with an evaluation set
report        what was dropped and why            check         what ``volley data check`` prints
"""
