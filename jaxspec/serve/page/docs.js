// The page at /docs: every endpoint of openapi.json, its fields, and a form to call it.

const at = (id) => document.getElementById(id);
const make = (name, text = "") => {
  const element = document.createElement(name);
  element.textContent = text;
  return element;
};

/** The schema that a reference names, or the schema itself. */
export function resolved(schema, root) {
  const name = schema?.$ref?.split("/").at(-1);
  return name ? root.components.schemas[name] : schema;
}

/** The type of a schema in words: "string | integer", "array of string". */
export function typeOf(schema, root) {
  if (!schema) return "any";
  if (schema.$ref) return schema.$ref.split("/").at(-1);
  if (schema.anyOf) return schema.anyOf.map((one) => typeOf(one, root)).join(" | ");
  if (schema.enum) return schema.enum.map((one) => JSON.stringify(one)).join(" | ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.type === "array") return `array of ${typeOf(schema.items, root)}`;
  return schema.type ?? "any";
}

/** An example of a request body, with the required fields. */
export function example(schema, root) {
  const { properties = {}, required = [] } = resolved(schema, root) ?? {};
  const body = {};
  for (const name of required) {
    const type = resolved(properties[name], root)?.type;
    body[name] = { array: [], object: {}, integer: 0, number: 0, boolean: false }[type] ?? "";
  }
  return body;
}

function fields(schema, root) {
  const { properties = {}, required = [] } = resolved(schema, root) ?? {};
  const table = make("table");
  for (const [name, one] of Object.entries(properties)) {
    const row = table.appendChild(make("tr"));
    row.appendChild(make("th", name));
    row.appendChild(make("td", typeOf(one, root)));
    const fallback = one.default === undefined ? "" : `default ${JSON.stringify(one.default)}`;
    row.appendChild(make("td", required.includes(name) ? "required" : fallback));
  }
  return table;
}

async function call(path, method, body, shown) {
  shown.textContent = "…";
  const headers = {};
  if (body !== null) headers["content-type"] = "application/json";
  if (at("key").value) headers.authorization = `Bearer ${at("key").value}`;
  try {
    const response = await fetch(path.slice(1), { method, headers, body });
    const text = await response.text();
    shown.textContent = `${response.status} ${response.statusText}\n${text}`;
  } catch (error) {
    shown.textContent = `The server cannot be reached: ${error.message}`;
  }
}

function show(path, method, operation, root) {
  const shown = make("details");
  const summary = shown.appendChild(make("summary"));
  summary.append(make("b", method.toUpperCase()), make("code", path));
  shown.appendChild(make("p", operation.description ?? operation.summary ?? ""));
  const schema = operation.requestBody?.content?.["application/json"]?.schema;
  const address = shown.appendChild(make("input"));
  address.value = path;
  address.setAttribute("aria-label", "Path");
  let body = null;
  if (schema) {
    shown.appendChild(fields(schema, root));
    body = shown.appendChild(make("textarea", JSON.stringify(example(schema, root), null, 2)));
    body.setAttribute("aria-label", "Body");
  }
  const send = shown.appendChild(make("button", "Send"));
  const answer = shown.appendChild(make("pre"));
  send.addEventListener("click", () => {
    call(address.value, method.toUpperCase(), body?.value ?? null, answer);
  });
  return shown;
}

async function main() {
  const response = await fetch("openapi.json");
  if (!response.ok) throw new Error(`openapi.json: status ${response.status}`);
  const root = await response.json();
  at("version").textContent = root.info.version;
  for (const [path, operations] of Object.entries(root.paths)) {
    for (const [method, operation] of Object.entries(operations)) {
      at("operations").append(show(path, method, operation, root));
    }
  }
}

main().catch((error) => {
  at("notice").textContent = error.message;
  at("notice").hidden = false;
});
