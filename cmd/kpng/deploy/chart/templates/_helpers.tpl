{{- /* SPDX-License-Identifier: Apache-2.0 */ -}}

{{- /* The default image, without tag. */ -}}
{{- define "kpng.image" -}}
{{- get (dict "iptables" "kpng-iptables" "kernelspace" "kpng-windows") .Values.backend | default "kpng" -}}
{{- end -}}

{{- /* The port of an address. */ -}}
{{- define "kpng.port" -}}
{{ splitList ":" . | last }}
{{- end -}}

{{- /* The address of the health checks. Those of the other proxy are at port 10256. */ -}}
{{- define "kpng.healthz" -}}
{{ .Values.healthzBindAddress | default (ternary "127.0.0.1:10356" "0.0.0.0:10256" (ne .Values.serviceProxyName "")) }}
{{- end -}}

{{- /* The address of the metrics. */ -}}
{{- define "kpng.metrics" -}}
{{ .Values.metricsBindAddress | default (ternary "127.0.0.1:10349" "127.0.0.1:10249" (ne .Values.serviceProxyName "")) }}
{{- end -}}

{{- /* The name of the instance, which must differ from that of another kpng on the node. */ -}}
{{- define "kpng.instance" -}}
{{ .Values.instance | default (ternary "beside" "" (ne .Values.serviceProxyName "")) }}
{{- end -}}
