{{- /*
The release's DaemonSets: its own, for nodes of no pool, and one for each pool, all with the same account. A template returns text
only, so they are put into the dict (second argument) as `all`: each is what the root is (first argument), with the pool's values
over the release's, its name as Pool, and for the release's own what the pools select as Others.
*/ -}}
{{- define "gna.pools" -}}
{{- $root := first . -}}
{{- $others := list -}}
{{- $pools := list -}}
{{- range $pool := $root.Values.pools -}}
{{- $others = append $others $pool.nodeSelector -}}
{{- $values := mergeOverwrite (deepCopy $root.Values) (deepCopy (omit $pool "name")) -}}
{{- $pools = append $pools (merge (dict "Values" $values "Pool" $pool.name "Others" list) (omit $root "Values")) -}}
{{- end -}}
{{- $own := merge (dict "Values" $root.Values "Pool" "" "Others" $others) (omit $root "Values") -}}
{{- $_ := set (last .) "all" (prepend $pools $own) -}}
{{- end -}}

{{- /* Whether a template (second argument) says something of any of them. */ -}}
{{- define "gna.anyPool" -}}
{{- $template := last . -}}
{{- $box := dict -}}
{{- include "gna.pools" (list (first .) $box) -}}
{{- $found := "" -}}
{{- range $box.all -}}
{{- if include $template . }}{{ $found = "true" }}{{ end -}}
{{- end -}}
{{- $found -}}
{{- end -}}

{{- /* What a pool's objects have behind the release's names; nothing for its own. */ -}}
{{- define "gna.poolSuffix" -}}
{{- with .Pool }}-pool-{{ . }}{{ end -}}
{{- end -}}

{{- /* Beside those of all agents. The release's own DaemonSet had its selector before there were pools, and selectors stay as
       they are: it matches the pods of pools, too, but a pod that has an owner is no other's. */ -}}
{{- define "gna.poolLabel" -}}
{{- with .Pool }}gpu-node-agent.io/pool: {{ . }}{{ end -}}
{{- end -}}

{{- /* The values' affinity; of the release's own without the nodes of pools. A node outside a selector lacks one of its labels:
       there is a term for each. */ -}}
{{- define "gna.affinity" -}}
{{- /* Not with simulated GPUs: no node has a label that names GPUs then. */ -}}
{{- $affinity := .Values.simulator.enabled | ternary dict (.Values.affinity | default dict | deepCopy) -}}
{{- if .Others -}}
{{- $key := "requiredDuringSchedulingIgnoredDuringExecution" -}}
{{- $node := get $affinity "nodeAffinity" | default dict -}}
{{- $terms := dig $key "nodeSelectorTerms" (list dict) $node -}}
{{- range $selector := .Others -}}
{{- $longer := list -}}
{{- range $term := $terms -}}
{{- range $label, $value := $selector -}}
{{- $not := dict "key" $label "operator" "NotIn" "values" (list $value) -}}
{{- $longer = append $longer (set (deepCopy $term) "matchExpressions" (append (get $term "matchExpressions" | default list) $not)) -}}
{{- end -}}
{{- end -}}
{{- $terms = $longer -}}
{{- end -}}
{{- $_ := set $affinity "nodeAffinity" (set $node $key (dict "nodeSelectorTerms" $terms)) -}}
{{- end -}}
{{- if $affinity }}{{ toYaml $affinity }}{{ end -}}
{{- end -}}
