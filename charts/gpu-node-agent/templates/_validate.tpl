{{- /* Combinations that no single value shows to be wrong; each with its remedy. */ -}}
{{- define "gna.validate" -}}
{{- $v := .Values -}}
{{- if and (eq .Release.Namespace "default") (not $v.allowDefaultNamespace) -}}
{{- fail "the agent needs host folders and should not live beside users' pods: install into a namespace of its own (helm install --namespace gpu-node-agent --create-namespace ...), or set allowDefaultNamespace: true" -}}
{{- end -}}
{{- if not (or $v.pgpu.enabled $v.vgpu.enabled $v.mps.enabled) -}}
{{- fail "pgpu.enabled, vgpu.enabled and mps.enabled are all false: nothing would ever be offered; set at least one to true" -}}
{{- end -}}
{{- range $key := list "modes" "http" "version" -}}
{{- if hasKey $v.config $key -}}
{{- fail (printf "config.%s follows from other values of this chart: use pgpu.enabled, vgpu.enabled, mps.enabled or port instead" $key) -}}
{{- end -}}
{{- end -}}
{{- range $block, $keys := dict "kubelet" (list "root" "devicePlugins") "driver" (list "root" "devRoot") "host" (list "state" "run" "cdi" "cgroups" "sysfs") "cluster" (list "nodeName" "kubeconfig") -}}
{{- range $key := $keys -}}
{{- if hasKey (dig $block dict $v.config) $key -}}
{{- fail (printf "config.%s.%s must fit the mounts of the DaemonSet, so the chart sets it: use the values driver and kubelet" $block $key) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $mode := dig "defaultMode" "none" $v.config -}}
{{- range $name := list "pgpu" "vgpu" "mps" -}}
{{- if and (eq $mode $name) (not (get $v $name).enabled) -}}
{{- fail (printf "config.defaultMode is %s, but %s.enabled is false: switch the mode on, or choose another default" $name $name) -}}
{{- end -}}
{{- end -}}
{{- if and $v.metrics.podMonitor.enabled $v.metrics.serviceMonitor.enabled -}}
{{- fail "metrics.podMonitor and metrics.serviceMonitor are both on: every agent would be scraped twice; leave one of them off" -}}
{{- end -}}
{{- if and $v.networkPolicy.enabled $v.hostNetwork -}}
{{- fail "networkPolicy does not apply to pods on the host's network: set hostNetwork: false, or networkPolicy.enabled: false" -}}
{{- end -}}
{{- if and (not $v.serviceAccount.create) (not $v.serviceAccount.name) -}}
{{- fail "serviceAccount.create is false and serviceAccount.name is empty: name the account to use; the namespace's default one must not get these rights" -}}
{{- end -}}
{{- if and $v.mps.enabled $v.runtimeClassName -}}
{{- fail "mps.enabled mounts the host's driver and needs no NVIDIA runtime for the agent: leave runtimeClassName empty" -}}
{{- end -}}
{{- if and $v.mps.enabled (ne $v.driver.source "host") (ne $v.driver.hostRoot "/") -}}
{{- fail "driver.hostRoot is set and mps.enabled takes the driver from there: say so with driver.source: host" -}}
{{- end -}}
{{- end -}}
