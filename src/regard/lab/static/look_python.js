// The lines that reproduce a view, after those that the server gives for model and input.
export function headLines(panel, all = false) {
  const { state } = panel, attention = panel.attention(), layer = state.layer || 0, head = state.head || 0;
  const lines = [panel.input.python.trimEnd(), ""];
  if (state.weighting === "rollout") lines.push("from regard.visualize import rollout", "", `print(rollout(maps${attention === "self" ? "" : `["${attention}"]`})[0, ${state.token ?? 0}])`);
  else if (all) lines.push("from regard import show", "", "show(model, inputs).save(\"heads.svg\")");
  else lines.push("from regard import show", "", `show(model, inputs, layer=${layer}, head=${head}).save("head.svg")`);
  return `${lines.join("\n")}\n`;
}
