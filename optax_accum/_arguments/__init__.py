"""What users pass: functions, their arguments and options. Each error says the rule, the value and the remedy."""
