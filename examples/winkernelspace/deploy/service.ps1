# SPDX-License-Identifier: Apache-2.0
#
# Installs winkernelspace as a Windows service that starts with the machine, for nodes
# without hostProcess containers (containerd before 1.7). As an administrator:
#
#   .\service.ps1 -Install -Program C:\k\winkernelspace.exe -Arguments '--network l2bridge --kubeconfig C:\k\config'
#   .\service.ps1 -Uninstall -Program C:\k\winkernelspace.exe -Arguments '--network l2bridge'
param(
    [switch]$Install,
    [switch]$Uninstall,
    [string]$Name = 'winkernelspace',
    [Parameter(Mandatory)][string]$Program,
    [string]$Arguments = ''
)
$ErrorActionPreference = 'Stop'

# Runs sc.exe, and fails if it does.
function Invoke-Sc {
    sc.exe @args | Out-Null
    if ($LASTEXITCODE -ne 0) { throw "sc.exe ${args}: status $LASTEXITCODE" }
}

if ($Install) {
    New-Service -Name $Name -BinaryPathName "`"$Program`" $Arguments" -StartupType Automatic `
        -Description 'Proxies Kubernetes services by the Host Networking Service' | Out-Null
    # Restart the service ten seconds after each failure. With failureflag, an exit with an
    # error is a failure too, not only a crash.
    Invoke-Sc failure $Name reset= 3600 actions= restart/10000
    Invoke-Sc failureflag $Name 1
    Start-Service -Name $Name
} elseif ($Uninstall) {
    # A missing service is not an error: an earlier uninstallation may have stopped halfway.
    if (Get-Service $Name -ErrorAction SilentlyContinue) {
        Stop-Service -Name $Name
        Invoke-Sc delete $Name
    }
    # Load balancers remain when the program ends. This removes all of them.
    $cleanup = Start-Process -FilePath $Program -ArgumentList "$Arguments --cleanup" -Wait -NoNewWindow -PassThru
    if ($cleanup.ExitCode -ne 0) { throw "$Program --cleanup ended with $($cleanup.ExitCode)" }
} else {
    throw 'Give -Install or -Uninstall.'
}
