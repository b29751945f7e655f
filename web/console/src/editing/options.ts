/** Options of fields that name an agent, a tool or a workflow. */

import type { Option } from "../fields";
import { pawl } from "../state";

export async function agentOptions(): Promise<Option[]> {
  const { agents = [] } = await pawl.agents.listAgents({ pageSize: 200 });
  return [["", "The default agent"], ...agents.map(({ definition: { name = "" } = {} }): Option => [name, name]).filter(([name]) => name !== "default")];
}

export async function toolOptions(): Promise<Option[]> {
  const { tools = [] } = await pawl.tools.listTools({ pageSize: 200 });
  return tools.map(({ definition }): Option => [definition?.name ?? "", ""]);
}

export async function workflowOptions(): Promise<Option[]> {
  const { workflows = [] } = await pawl.workflows.listWorkflows({ pageSize: 200 });
  return [["", "A run of an agent"], ...workflows.map(({ name = "" }): Option => [name, `The workflow ${name}`])];
}
