{{- /* How much of a resource container c asks for, in CEL. Extended resources are whole numbers, `1k` is one. */ -}}
{{- define "gna.amount" -}}
('{{ . }}' in c.?resources.?limits.orValue({}) ? quantity(string(c.resources.limits['{{ . }}'])).asInteger() : 0)
{{- end -}}

{{- /* The rules of agent/model/pod.py that hold whatever the node; sentences as there. */ -}}
{{- define "gna.requestRules" -}}
{{- $vcore := include "gna.amount" "tencent.com/vcuda-core" -}}
{{- $vmemory := include "gna.amount" "tencent.com/vcuda-memory" -}}
{{- $mcore := include "gna.amount" "nvidia.com/mps-core" -}}
{{- $mmemory := include "gna.amount" "nvidia.com/mps-memory" -}}
{{- $whole := include "gna.amount" "nvidia.com/gpu" -}}
{{- $shared := include "gna.amount" "nvidia.com/gpu.shared" -}}
{{- $rules := list
  (list (printf "%s > 100 && %s %% 100 != 0" $vcore $vcore)
    "asks for more than 100 tencent.com/vcuda-core: that stands for whole GPUs and must be a multiple of 100")
  (list (printf "%s > 0 && %s < 100 && %s == 0" $vcore $vcore $vmemory)
    "asks for tencent.com/vcuda-core without tencent.com/vcuda-memory: add tencent.com/vcuda-memory to its limits, or ask for 100 cores to get a whole GPU")
  (list (printf "%s > 100" $mcore)
    "asks for more than 100 nvidia.com/mps-core: a share lies on one GPU, which has 100")
  (list (printf "%s > 0 && %s == 0" $mcore $mmemory)
    "asks for nvidia.com/mps-core without nvidia.com/mps-memory: add nvidia.com/mps-memory to its limits")
  (list (printf "%s > 0 && %s == 0" $mmemory $mcore)
    "asks for nvidia.com/mps-memory without nvidia.com/mps-core: add nvidia.com/mps-core to its limits")
  (list (printf "(%s + %s > 0 ? 1 : 0) + (%s + %s > 0 ? 1 : 0) + (%s + %s > 0 ? 1 : 0) > 1" $whole $shared $vcore $vmemory $mcore $mmemory)
    "asks for GPUs in two modes: use either nvidia.com/gpu, or tencent.com/vcuda-*, or nvidia.com/mps-* in one container")
-}}
{{- range $rule := $rules }}
- expression: {{ printf "!variables.containers.exists(c, %s)" (index $rule 0) | quote }}
  messageExpression: {{ printf "'container ' + variables.containers.filter(c, %s)[0].name + ' %s'" (index $rule 0) (index $rule 1) | quote }}
{{- end }}
{{- end -}}
