"""From chat questions to an EAGLE-3 draft of a reasoning model; `dvc.yaml` shows the stages."""
