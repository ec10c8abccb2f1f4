"""What a draft gains or loses by a choice; a row for each draft in reports/experiments.csv.

    python -m experiments.reasoning      # reasoning kept, dropped, emptied
    python -m experiments.recipe         # this project's recipe and speculators'
    python -m experiments.states         # smaller states, other targets: docs/hidden_states.md

    trial        one draft: trained and judged in a scratch project that borrows data
    variant      pipeline.train with what params.yaml has no key for

They start from a finished `make repro`, change nothing in it, and take up to an hour each.
"""
